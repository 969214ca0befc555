"""The style sheet of the report page: system fonts, light and dark, no horizontal scrolling but inside tables."""

CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ground: #f4f5f8; --ink: #1b2033; --soft: #5c647c; --line: #dfe3ec;
  --indigo: #2f4b9c; --teal: #16837a; --violet: #7a4fb3; --rose: #b33f6b; --amber: #b87514; --grey: #939bb0; --warn: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --paper: #191d2b; --ground: #11141f; --ink: #e6e9f2; --soft: #9aa3bb; --line: #2c3246;
  --indigo: #7f9bf0; --teal: #4fc3b6; --violet: #b691ea; --rose: #ee86ad; --amber: #e6ae55; --grey: #6f7891; --warn: #fb8a4c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
p { margin: 4px 0 12px; }
.soft, small { color: var(--soft); }
small { font-size: 12.5px; display: block; overflow-wrap: anywhere; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin-top: 18px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; min-width: 0; }
.card b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 10px 0 0; list-style: none; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; background: var(--grey); }
.scroll { overflow-x: auto; margin: 0 -20px -18px; padding: 0 20px 14px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; white-space: nowrap; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
td.name { min-width: 190px; font-weight: 600; overflow-wrap: anywhere; }
td.name small { font-weight: 400; }
td.reason { min-width: 200px; }
th.number, td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tag { white-space: nowrap; font-weight: 600; }
.rows { display: grid; grid-template-columns: minmax(140px, 30%) 1fr auto; gap: 6px 14px; align-items: center; font-size: 13.5px; }
.rows > * { min-width: 0; overflow-wrap: anywhere; }
.rows .value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)); gap: 18px 22px; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 12.5px; color: var(--soft); overflow-wrap: anywhere; }
figcaption b { display: block; color: var(--ink); font-weight: 600; }
.ends { display: flex; justify-content: space-between; font-size: 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; }
svg.histogram { height: 84px; border-bottom: 1px solid var(--line); }
svg.bar { height: 10px; border-radius: 5px; }
svg.stacked { height: 16px; margin-top: 10px; }
.in, .front { fill: var(--indigo); } .out, .front.low { fill: var(--warn); } .back { fill: var(--line); }
.end { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 4 3; vector-effect: non-scaling-stroke; }
.zero { stroke: var(--soft); stroke-width: 1.2; vector-effect: non-scaling-stroke; }
.part, .front.float { fill: var(--grey); }
.int8 { fill: var(--indigo); background: var(--indigo); } .row { fill: var(--teal); background: var(--teal); }
.weight { fill: var(--violet); background: var(--violet); } .int4 { fill: var(--rose); background: var(--rose); }
.out-dot { background: var(--warn); }
.bf16 { fill: var(--amber); background: var(--amber); }
.key { display: inline-block; width: 22px; border-top: 2px dashed var(--ink); vertical-align: middle; margin-right: 7px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 8px 0 0; font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 560px) { main { padding: 18px 12px 40px; } section { padding: 14px; }
  .scroll { margin: 0 -14px -14px; padding: 0 14px 10px; } .rows { grid-template-columns: 1fr auto; }
  .rows .label { grid-column: 1 / -1; margin-top: 4px; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; } }
@media print { body { background: none; } section, .card { break-inside: avoid; } }
"""
