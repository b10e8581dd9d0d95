"""Metal kernels of the recurrences and of what surrounds them. Arrays in, arrays out: nothing here knows a model.

`kernels` assembles and compiles; `recurrence`, `decode`, `prefill` and `layers` hold the launchers.
"""
