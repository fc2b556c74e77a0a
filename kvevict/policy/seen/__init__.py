"""The data that the engine gives a policy during a read: immutable descriptions of rows and slots."""
