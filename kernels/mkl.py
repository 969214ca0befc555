NAME="mkl"
def when(t,s): return "no"
def pack(w): return w
def emit(*a): raise AssertionError
