"""The dashboard: a web server that shows the results database, and never changes it.

:func:`gockpt.dashboard.app.create_app` makes the application; ``gockpt dashboard`` serves it.
"""
