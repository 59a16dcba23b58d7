"""The distributed tuner: finds the fastest config of a kernel or an operator, and cannot desynchronise the ranks.

config     candidates and spaces of them
search     what is measured, how often, and what came of it
"""
