"""The training stream: epoch order, lanes and segments of one corpus or a mixture.

order.py           in which order an epoch reads blocks and documents, and its unread part
mixture.py         several corpora read as one, in shares given by their weights
lanes.py           which tokens each lane and each rank reads
segments.py        reads tokens and their ages at any position, cuts them into the segments of some
                   lanes, and divides these into the batches that steps read
segment_stream.py  the segments of one rank, prefetched by a thread; source of a WebDataset pipeline
"""
