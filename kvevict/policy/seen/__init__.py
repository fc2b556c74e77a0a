"""What a policy sees of a read: values, made by the engine; nothing here is changed once made."""
