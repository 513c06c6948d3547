"""`make mac-report`: everything that only a Mac can tell, by one command that needs nobody, in one file.

Uses the standard library only, as the first step installs the rest.
"""
