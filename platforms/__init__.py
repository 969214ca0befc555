"""Data about machines: targets as values, a catalogue of them, and the detection of the one this runs on."""
