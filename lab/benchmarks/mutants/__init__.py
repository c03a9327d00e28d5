"""Do the tests notice a changed operator, comparison or constant? `make mutants`.

`sample` draws single changes (cosmic-ray's), `record` runs the tests once and notes which test runs
which line, `run` makes one change after the other in a copy of the project and runs the tests of
its line, `survivors` says why a change that nothing noticed changes nothing that matters.
"""
