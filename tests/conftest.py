"""What holds for all tests."""

import os
import signal
from importlib.util import find_spec

# Torch's threads spin while they wait for each other. Where two files run side by side, and each
# has as many threads as there are cores, most of them would spin for one that has no core: a
# forward pass of the starter model took minutes, and takes a second. To be set before torch is
# imported; servers that tests start have it from here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What takes long because the machine is busy is right all the same.
if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

# A shell that runs this in the background has its programs ignore Ctrl-C, and they pass that on to
# the servers and chats whose Ctrl-C is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
