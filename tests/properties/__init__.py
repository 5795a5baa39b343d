"""Properties of the core that hold for whatever hypothesis finds, and simulated hours.

`tests/job` itself takes about a second; what takes longer stands here, by the same names.
"""
