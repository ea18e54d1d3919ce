"""The training stream: epoch order, lanes and segments of one corpus or a mixture.

order.py           in which order an epoch reads blocks and documents
mixture.py         several corpora read as one, in shares given by their weights
lanes.py           which tokens each lane and each rank reads
cursor.py          reads tokens and their ages at any position of an epoch's order
remainder.py       the unread part of an epoch when the number of lanes changes
segments.py        cuts the segments of some lanes: tokens, targets and ages
documents.py       which documents a lane reads at given positions
segment_stream.py  the segments of one rank, prefetched by a thread
pipeline.py        a WebDataset pipeline with the segment stream as its source
"""
