def note_of(t): return ()
def refuse_what_differs(c): pass
