"""Between processes: how ranks meet (`rendezvous`, `network`), and what they say then (`transport` over `frames` and
`wire`; `journal`, which peers read without waiting)."""
