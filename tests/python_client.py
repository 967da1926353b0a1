# SPDX-License-Identifier: Apache-2.0
"""Drives residencyd over gRPC from Python, as a program of somebody else would.

Run by python_client_test.sh, which puts stubs made from proto/ on the path. Sizes that are expected come from
truth.json, which another library wrote, and from the layout's stated rules: a tensor starts at a multiple of
256 bytes, a component takes whole granules of 2 MiB.
"""

import collections
import json
import os
import shutil
import signal
import subprocess
import tempfile
import unittest

import grpc
import residency_pb2 as pb
import residency_pb2_grpc as pb_grpc

MIB = 1 << 20
GRANULE_BYTES = 2 * MIB
# Room for flux-like, not for llama-sharded.
DEVICE_BUDGET_BYTES = 12 * MIB
CALL_SECONDS = 30
DATA = os.path.dirname(os.path.realpath('tests/data/real/truth.json'))


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def tensors_of(model):
    """The tensors of `model` as another library read them: {component: [bytes]}; its files lie in folders."""
    with open(os.path.join(DATA, 'truth.json')) as file:
        truth = json.load(file)
    components = collections.defaultdict(list)
    for path, tensors in truth.items():
        if path.startswith(model + '/'):
            folder = os.path.dirname(path)[len(model) + 1:]
            components[folder] += [tensor['bytes'] for tensor in tensors.values()]
    return components


def device_bytes_of(model):
    return sum(round_up(sum(round_up(size, 256) for size in sizes), GRANULE_BYTES)
               for sizes in tensors_of(model).values())


def refusal_of(error):
    """The Refusal in the details of a failed call."""
    trailers = dict((pair.key, pair.value) for pair in error.trailing_metadata())
    status = pb.RpcStatus.FromString(trailers['grpc-status-details-bin'])
    assert status.code == error.code().value[0], status
    refusal = pb.Refusal()
    assert status.details[0].Unpack(refusal), status
    return refusal


class PythonClientTest(unittest.TestCase):

    def setUp(self):
        # A Unix socket's path has at most 107 bytes, so not below the test's own long directory.
        self.directory = tempfile.mkdtemp(prefix='r.', dir='/dev/shm' if os.path.isdir('/dev/shm') else '/tmp')
        self.addCleanup(shutil.rmtree, self.directory)
        self.daemon = subprocess.Popen([
            'daemon/residencyd', '--runtime_dir=' + self.directory, '--driver=sim', '--sim_device_bytes=1GiB',
            '--device_reserve=0', '--device_budget=%d' % DEVICE_BUDGET_BYTES])
        self.addCleanup(self.end_daemon)
        self.channel = grpc.insecure_channel('unix:%s/grpc.sock' % self.directory)
        self.addCleanup(self.channel.close)
        grpc.channel_ready_future(self.channel).result(timeout=CALL_SECONDS)
        self.stub = pb_grpc.ResidencyStub(self.channel)

    def end_daemon(self):
        self.daemon.send_signal(signal.SIGTERM)
        self.assertEqual(self.daemon.wait(timeout=10), 0)

    def register(self, name):
        request = pb.RegisterModelRequest(name=name, source=os.path.join(DATA, name))
        return list(self.stub.RegisterModel(request, timeout=CALL_SECONDS))

    def activate(self, name):
        return self.stub.Activate(pb.ActivateRequest(model=name), timeout=CALL_SECONDS)

    def status(self, name=''):
        return self.stub.GetStatus(pb.GetStatusRequest(model=name), timeout=CALL_SECONDS).status

    def refused(self, call):
        with self.assertRaises(grpc.RpcError) as context:
            call()
        return context.exception, refusal_of(context.exception)

    def test_registering_streams_progress_and_ends_with_the_sizes(self):
        messages = self.register('flux-like')
        components = tensors_of('flux-like')
        payload = sum(sum(sizes) for sizes in components.values())
        self.assertEqual([message.done for message in messages], [False] * (len(messages) - 1) + [True])
        done = [message.bytes_done for message in messages]
        self.assertEqual(done, sorted(done))
        self.assertEqual(messages[-1].tensors, sum(len(sizes) for sizes in components.values()))
        self.assertEqual(messages[-1].payload_bytes, payload)
        self.assertEqual(messages[-1].payload_bytes + messages[-1].tax_bytes, device_bytes_of('flux-like'))

    def test_a_model_goes_on_the_device_and_off_and_is_forgotten(self):
        self.register('flux-like')
        expected_bytes = device_bytes_of('flux-like')

        activated = self.activate('flux-like')
        self.assertEqual(activated.lease_id, 0)
        self.assertEqual(activated.bytes_moved, expected_bytes)
        self.assertEqual(activated.device_bytes, expected_bytes)
        self.assertEqual(activated.refilled_cells, 0)
        self.assertEqual(self.activate('flux-like').bytes_moved, 0)

        status = self.status('flux-like')
        model, = status.models
        self.assertEqual(model.state, pb.MODEL_STATE_ACTIVE)
        self.assertEqual(model.device_bytes, expected_bytes)
        self.assertEqual(model.components_on_gpu, len(tensors_of('flux-like')))
        device, = status.devices
        self.assertEqual(device.total_bytes, 1 << 30)
        self.assertEqual(device.broker_bytes, expected_bytes)
        self.assertEqual(status.daemon.driver, 'sim')
        self.assertEqual(status.daemon.pid, self.daemon.pid)

        verified = self.stub.Verify(pb.VerifyRequest(model='flux-like'), timeout=CALL_SECONDS)
        self.assertEqual(verified.verified_cells, activated.verified_cells)
        self.assertEqual((verified.refilled_cells, verified.absent_cells), (0, 0))

        gone = self.stub.Deactivate(pb.DeactivateRequest(model='flux-like'), timeout=CALL_SECONDS)
        self.assertEqual(gone.pooled_bytes + gone.freed_bytes, expected_bytes)
        self.assertEqual(gone.copied_bytes, 0)
        model, = self.status('flux-like').models
        self.assertEqual((model.state, model.device_bytes), (pb.MODEL_STATE_INACTIVE, 0))

        unloaded = self.stub.UnloadModel(pb.UnloadModelRequest(model='flux-like'), timeout=CALL_SECONDS)
        self.assertGreaterEqual(unloaded.host_bytes, sum(map(sum, tensors_of('flux-like').values())))
        self.assertEqual(self.status().host.pinned_bytes, 0)
        error, refusal = self.refused(lambda: self.status('flux-like'))
        self.assertEqual((error.code(), refusal.reason), (grpc.StatusCode.NOT_FOUND, 'NO_SUCH_MODEL'))

    def test_a_watcher_is_told_of_every_change(self):
        self.register('flux-like')
        watch = self.stub.WatchStatus(pb.WatchStatusRequest(model='flux-like'), timeout=CALL_SECONDS)
        states = (message.status.models[0].state for message in watch)
        self.assertEqual(next(states), pb.MODEL_STATE_INACTIVE)
        self.activate('flux-like')
        self.assertIn(pb.MODEL_STATE_ACTIVE, states)  # Reads on until it comes, or the call's time is up.
        self.stub.Deactivate(pb.DeactivateRequest(model='flux-like'), timeout=CALL_SECONDS)
        self.assertIn(pb.MODEL_STATE_INACTIVE, states)
        watch.cancel()

    def test_a_refusal_for_want_of_room_says_how_much_is_needed_and_available(self):
        self.register('llama-sharded')
        error, refusal = self.refused(lambda: self.activate('llama-sharded'))
        self.assertEqual((error.code(), refusal.reason), (grpc.StatusCode.RESOURCE_EXHAUSTED, 'GPU_BUDGET'))
        self.assertEqual(refusal.needed_bytes, device_bytes_of('llama-sharded'))
        self.assertEqual(refusal.available_bytes, DEVICE_BUDGET_BYTES)
        model, = self.status('llama-sharded').models
        self.assertEqual((model.state, model.device_bytes), (pb.MODEL_STATE_INACTIVE, 0))

    def test_a_refusal_for_a_name_that_is_not_known_gives_no_sizes(self):
        error, refusal = self.refused(lambda: self.activate('nobody'))
        self.assertEqual((error.code(), refusal.reason), (grpc.StatusCode.NOT_FOUND, 'NO_SUCH_MODEL'))
        self.assertFalse(refusal.HasField('needed_bytes') or refusal.HasField('available_bytes'))

    def test_health_and_reflection_answer_by_their_standard_names(self):
        # Debian packages no Python stubs for these two, so their few bytes are written out: an empty
        # HealthCheckRequest, a HealthCheckResponse with status (1) SERVING (1), and a
        # ServerReflectionRequest with an empty list_services (7).
        health = self.channel.unary_unary('/grpc.health.v1.Health/Check')(b'', timeout=CALL_SECONDS)
        self.assertEqual(health, b'\x08\x01')
        reflection = self.channel.stream_stream('/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo')
        answers = reflection(iter([b'\x3a\x00']), timeout=CALL_SECONDS)
        self.assertIn(b'residency.v1.Residency', next(answers))


if __name__ == '__main__':
    unittest.main()
