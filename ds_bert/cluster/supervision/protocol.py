"""How the processes of a job speak to each other: the environment variables and the messages, in one place.

The command (or a launcher) starts, for each rank, a supervisor, which starts the rank. Variables go down that tree;
messages go between the supervisors and the coordinator beside rank 0 (JSON lines over TCP, see `network.connection`)
and from a rank up to its supervisor (one JSON object through a pipe).

    to the coordinator    {"job": ..., "rank": R or null, "host": ...}   hello; null is the process that started the job
                          {"done": true}                                 the rank came to its end
                          {"failed": {...}}                              an `outcome.Failure`
                          {"stop": "SIGTERM"}                            save, then end all ranks
                          {"kill": "SIGINT"}                             end all ranks now
    from the coordinator  {"stop": "SIGTERM"}
                          {"outcome": {...}}                             an `outcome.Outcome`: the job is over
    rank to supervisor    {"kind": ..., "reason": ..., "exit_code": ..., "traceback": ...}
"""

# Set by whoever starts the job, read by supervisors.
JOB = "DS_BERT_JOB"
"""Name that every process of the job says first; it keeps jobs apart."""
COORDINATOR_PORT = "DS_BERT_COORDINATOR_PORT"
"""TCP port of the coordinator on rank 0's host."""
COMMAND = "DS_BERT_COMMAND"
"""What messages to the user call the job."""
FAILURE_TIMEOUT = "DS_BERT_FAILURE_TIMEOUT"
"""Seconds without a sign of life until a rank counts as lost. Read by ranks, too."""

# Set by a supervisor, read by its rank.
REPORT_FD = "DS_BERT_REPORT_FD"
"""Descriptor of the pipe for the rank's report."""
STARTED_BY = "DS_BERT_STARTED_BY"
"""Launcher that started the ranks."""

DEFAULT_TIMEOUT_S = 60.0
