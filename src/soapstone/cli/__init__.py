"""The command line: one module for each command, put together in `main`.

A command module offers `register(app)`, which adds its commands to the typer app, and imports what is
heavy (torch, the zoo) inside its functions, so that `soapstone --help` answers at once.
Commands print through `output`; what a user did wrong is raised as a `SoapstoneError`, and `outcome`
turns it into one sentence and an exit code.
"""
