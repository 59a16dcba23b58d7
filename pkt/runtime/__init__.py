"""Host side: worlds, the symmetric heap and what lies below it.

In the order data flows: `backend` (the seam), `ledger` and `heap` (where a tensor lies), `agreement` (do the
ranks ask for the same), `tensor` and `factories` (what the user holds), `world` (who takes part), `launch`
(many ranks from one call).
"""
