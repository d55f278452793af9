"""runs.db and logs/ beside it: tables, migrations, writes (sqlmodel) and reads (sqlite3 alone)."""
