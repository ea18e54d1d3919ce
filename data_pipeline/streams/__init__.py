"""The training stream: epoch order, lanes and segments of one corpus or a mixture.

order.py           in which order an epoch reads blocks and documents, and its unread part
mixture.py         several corpora read as one, in shares given by their weights
lanes.py           which tokens each lane and each rank reads
cursor.py          reads tokens and their ages at any position of an epoch's order
segments.py        cuts the segments of some lanes (tokens, targets and ages), and divides them into
                   the batches that steps read
segment_stream.py  the segments of one rank, prefetched by a thread; source of a WebDataset pipeline
"""
