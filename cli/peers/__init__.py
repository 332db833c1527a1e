"""Other people's checkpoint engines, really run by ``gockpt bench`` over the same link and disk.

:mod:`.catalog` lists them; each family has one module, with an adapter behind the protocol in
:mod:`.engine`. What the adapters add is only time: on an emulated device an engine's own copies
take the link's, and its own files the disk's (:mod:`.host`). Nothing in here is imported by the
engine of gockpt, and a peer's package is only imported when that peer was asked for.
"""
