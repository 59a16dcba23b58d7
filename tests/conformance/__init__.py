"""Properties of every operator in the registry. An operator's own tests check only what is particular to it.

`inputs` makes operands and bounds from a declaration, and `checks` has one function for each property. `test_operators`
runs all of them over the registry; `test_new_operator` over an operator that it writes, and over planted faults.
"""
