"""Many calls of one method on one stream (attach.proto): the caller's end and the end that serves them.

A call of its own costs gRPC some 3 to 4 times the CPU of the same bytes as frames on a stream that is there
already, and what several calls have ready goes out in one message. What a call of its own gives for nothing
is done here: deadlines, cancellation, statuses, and a window per call, so that an answer that nobody takes
stops its own source alone.
"""
