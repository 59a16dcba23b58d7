"""Between processes: how ranks find and prove each other (`rendezvous`, `network`), collective calls (`transport`) over
connections (`frames`), values as text (`wire`), and a log that others read without waiting (`journal`)."""
