"""Metal kernels of the recurrences and of what surrounds them. Arrays in, arrays out: nothing here knows a model.

`kernels` assembles and compiles; `recurrence`, `decode`, `prefill`, `rwkv7` and `layers` hold the launchers.
"""
