"""Training of the model of parts. Imports model.parts, and of training what both families share.

Read `rows.py` first: it makes the training rows, and nothing of a row's day or later enters its inputs. `counts.py` and
`factors.py` say what was known of pins before a day; `task.py` has the loss, the optimizer and the choice of steps.
"""
