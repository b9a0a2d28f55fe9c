"""Signal dispositions of the processes that tests start."""

DEFAULT_SIGNALS = ("env", "--default-signal=INT,TERM,HUP,QUIT")
"""Put before a command that a test sends signals to: without it, the command ignores what the test run itself ignores,
for example SIGINT where `make test` runs in the background of a script. The process ID stays the same."""
