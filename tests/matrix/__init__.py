"""Programs of many kinds, each stopped, killed or moved to another world at many places.

`cells` lists what is played, `programs` holds the programs, which note what they do by `record`,
`play` plays a cell, and `compare` holds what was noted against the undisturbed run.
"""
