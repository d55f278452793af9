"""The background follower: spool bytes to store, exactly once; intents; alerts; final states. `lease` starts it on demand."""
