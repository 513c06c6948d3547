"""Handshake, signs of life, and the process that starts ranks again: on sockets, without a model."""

import json
import socket
import sys
import time
from dataclasses import asdict, replace
from threading import Event, Thread

import mlx.core as mx
import numpy as np
import pytest
from support.http.ports import free_port

from mlxinfer.cache.base import Segment
from mlxinfer.distributed.agreement import Hello, model_digest
from mlxinfer.distributed.control_channel import ControlChannel, FrameKind, Heartbeat
from mlxinfer.distributed.group import Group
from mlxinfer.distributed.messages import MessageBuffer, Op, StepMessage, pack_pages, parse_messages, unpack_pages
from mlxinfer.distributed.nodes import Host, Nodes, read_nodes
from mlxinfer.distributed.supervise import Supervisor
from mlxinfer.errors import GroupLostError, NodesError


def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.fixture
def ends():
    both = connected()
    links = [ControlChannel(each) for each in both]
    yield links
    for link in links:
        link.close()


def watched(link, silence_s):
    """A heartbeat on one link: (what was lost, an event that says so)."""
    lost, told = [], Event()

    def note(place, why):
        lost.append(why)
        told.set()

    return Heartbeat([link], note, silence_s=silence_s), lost, told


def test_an_end_is_noticed_at_once(ends):
    heartbeat, lost, told = watched(ends[0], 60.0)
    ends[1].close()
    assert told.wait(50)  # silence would be noticed after 60
    assert lost == ["has ended"]
    heartbeat.stop()


def test_silence_is_noticed(ends):
    heartbeat, lost, told = watched(ends[0], 0.3)
    ends[1].send(FrameKind.BEAT)  # alive once, then never again
    assert told.wait(60)
    assert lost == ["has not been heard of for 0.3 s"]
    heartbeat.stop()


def test_those_that_beat_are_not_lost(ends):
    here, other = watched(ends[0], 30.0), watched(ends[1], 30.0)
    ends[1].send(FrameKind.STEPS, b"1234")
    assert not here[2].wait(0.6)
    before, end = ends[0].heard, time.monotonic() + 60
    while ends[0].heard == before:
        assert time.monotonic() < end, "nothing more was heard"
        time.sleep(0.01)
    for heartbeat, lost, _ in (here, other):
        assert not lost
        heartbeat.stop()


def test_messages_come_out_as_they_went_in():
    buffer = MessageBuffer()
    buffer.put(Op.FORK, (1, 2))
    rope = np.array([[64, 65, 65], [64, 65, 66], [64, 65, 65]], np.int32)
    segments = (Segment(0, 0, 3, 64, 90, 1, 2, -4, rope, ((64, 66), (66, 67))), Segment(4, 3, 1, 5, 6, 0, 1))
    step = StepMessage(7, mx.bfloat16, segments, ((0, 3), (2, 1)))
    buffer.put(Op.STEP, step.pack())
    buffer.put(Op.STORE, [7, 0, *pack_pages([[3, None, ~0], []])])
    buffer.drop(9)
    found = list(parse_messages(buffer.take()))
    assert [op for op, _ in found] == [Op.FORK, Op.STEP, Op.STORE, Op.DROP]
    unpacked = StepMessage.unpack(found[1][1])
    assert unpacked == step
    np.testing.assert_array_equal(unpacked.segments[0].rope, rope)
    assert unpacked.segments[1].rope is None
    assert unpack_pages(found[2][1][2:]) == [[3, None, -1], []]
    assert not buffer.take()


MINE = Hello(rank=0, nodes="n", version="1", mlx="2", device="cpu", model="m", memory=10)


@pytest.mark.parametrize(
    ("field", "line"),
    [("nodes", "rank 1 has another hostfile"), ("mlx", "rank 1 runs MLX x, and rank 0 2"), ("model", "rank 1 has another model")],
)
def test_a_rank_that_differs_is_refused_in_one_line(field, line):
    MINE.check(replace(MINE, rank=1))
    with pytest.raises(NodesError, match=line) as found:
        MINE.check(replace(MINE, rank=1, **{field: "x"}))
    assert "\n" not in str(found.value)


def test_rank_0_refuses_another_version_and_waits_for_the_right_one(capfd):
    port = free_port()
    nodes = Nodes((Host("127.0.0.1", port + 1), Host("127.0.0.1", port + 2)))
    group, mine = Group(nodes), Hello.mine(0, nodes.digest, "m", 100)
    found = []
    waiting = Thread(target=lambda: found.append(group._gather(mine)))
    waiting.start()
    older = reached(nodes)
    older.send_json(FrameKind.HELLO, asdict(replace(mine, rank=1, version="0.0.1")) | {"another": "field"})
    with pytest.raises(NodesError, match=r"rank 1 runs mlxinfer 0\.0\.1, and rank 0 .*: install the same"):
        older.expect(FrameKind.PLAN)
    right = reached(nodes)
    right.send_json(FrameKind.HELLO, asdict(replace(mine, rank=1, memory=50)))
    waiting.join(60)
    assert found == [[100, 50]]
    assert "refused: rank 1 runs mlxinfer 0.0.1" in capfd.readouterr().err
    group.close()


def reached(nodes):
    end = time.monotonic() + 60
    while True:
        try:
            return ControlChannel.connect(nodes.control, 5)
        except OSError:
            assert time.monotonic() < end


def test_copies_of_a_model_have_one_digest(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        content = bytearray(200_000)
        content[150_000] = name == "c"  # a byte of one sample, of two files of one size
        content[-1] = name == "c"
        (tmp_path / name / "model.safetensors").write_bytes(content)
    assert model_digest(tmp_path / "a") == model_digest(tmp_path / "b") != model_digest(tmp_path / "c")


def test_a_gguf_file_without_an_ending_has_a_digest_of_its_own(tmp_path):
    """Ollama names its files so."""
    for name in ("sha256-0", "sha256-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "blob").write_bytes(b"GGUF" + name.encode())
    assert model_digest(tmp_path / "sha256-0" / "blob") != model_digest(tmp_path / "sha256-1" / "blob")


@pytest.mark.parametrize(
    "written",
    [
        [{"ssh": "one", "ips": ["10.0.0.1"], "rdma": [None]}, {"ssh": "two", "ips": ["10.0.0.2"]}],
        {"backend": "ring", "hosts": [{"ssh": "one", "ips": ["10.0.0.1"]}, {"ssh": "two", "ips": ["10.0.0.2"]}]},
        [["10.0.0.1:32323"], ["10.0.0.2:32324"]],
    ],
)
def test_hostfiles_are_those_of_mlx(tmp_path, written):
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps(written))
    nodes = read_nodes(file)
    assert json.loads(nodes.ring()) == [["10.0.0.1:32323"], ["10.0.0.2:32324"]]
    assert nodes.control == ("10.0.0.1", 32322)


@pytest.mark.parametrize("text", ["", "[]", '[{"ips": ["10.0.0.1"]}]', '[{"ssh": "one"}, {"ssh": "two"}]'])
def test_other_hostfiles_are_refused_in_one_line(tmp_path, text):
    file = tmp_path / "hosts.json"
    file.write_text(text)
    with pytest.raises(NodesError, match=r"hosts\.json") as found:
        read_nodes(file)
    assert "\n" not in str(found.value)


CHILD = """
import json, os, sys, urllib.error, urllib.request
from pathlib import Path
seen = Path(sys.argv[1])
if not seen.exists():  # the first one is ready, and then loses its group
    seen.write_text("")
    os.write(int(os.environ["MLXINFER_RANK_CHILD"].split(":")[0]), b".")
    sys.exit(int(sys.argv[3]))
try:  # the second one is not ready yet
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/health", timeout=60)
except urllib.error.HTTPError as error:
    seen.write_text(f"{error.code} {json.loads(error.read())['error']['code']} {error.headers['retry-after']}")
"""


def test_a_lost_process_is_started_again_and_503_is_answered_meanwhile(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = [str(tmp_path / "seen"), str(listener.getsockname()[1]), str(GroupLostError.exit_code)]
        status = Supervisor([sys.executable, "-c", CHILD, *arguments], [listener]).run()
    assert status == 0
    assert (tmp_path / "seen").read_text() == "503 group_down 2"


@pytest.mark.parametrize(("status", "told"), [(0, 0), (2, 2), (1, 1)])
def test_a_process_that_would_only_fail_again_is_not_started_again(status, told):
    assert Supervisor([sys.executable, "-c", f"raise SystemExit({status})"]).run() == told
