"""Every request, reply and event, one module per server; each is a tagged, frozen msgspec.Struct.

Schema evolution (msgspec docs): fields are only ever added, with a default; an unknown field is ignored on the
wire. Every mutating message carries ``generation`` (slot) or ``epoch`` (arena); the receiver has one gate for it.
"""
