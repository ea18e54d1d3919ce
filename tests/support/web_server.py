"""A web server at a free port of 127.0.0.1, whose answers are a function of the test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Answer = Callable[[BaseHTTPRequestHandler], tuple[int, str]]
"""Of a request (`command`, `path`, `headers`): status and body."""


@contextmanager
def web_server(answer: Answer) -> Iterator[str]:
    """Answers all requests while the context is open; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
