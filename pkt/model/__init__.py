"""Settings and predicted times: the vocabulary that operators and the tuner share. It imports neither of them.

`config`: a candidate's settings, and spaces of candidates. `gpu`: rates and latencies of a GPU, measured link curves.
`cost`: the blocks from which an operator predicts its time.
"""
