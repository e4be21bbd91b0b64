"""Where the master listens; asked in a process of its own, since locust patches the standard library."""

import subprocess
import sys

from tests.service.running_server import ROOT

HELD = """
import socket
from locust.rpc.zmqrpc import Server
from loadtests.generator.processes import GeneratorError, listening_address

with listening_address("127.0.0.1") as (host, port):
    try:
        socket.socket().bind((host, port))  # as the system does for who asks for any
    except OSError as error:
        print(error.strerror)
    master = Server(host, port)
    socket.create_connection((host, port)).close()
    print("listens")
socket.create_connection((host, port)).close()
print("listens still")
try:
    with listening_address(f"{host}:{port}"):
        print("free")
except GeneratorError as error:
    print("not free" if "expected an address of this host that is free" in str(error) else error)
"""


def test_the_master_s_port_is_given_to_nobody_else_before_it_listens() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Address already in use", "listens", "listens still", "not free"]
