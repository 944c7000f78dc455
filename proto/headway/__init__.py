"""Protocol buffers of the headway API; the messages and stubs are in `headway.v1`."""
