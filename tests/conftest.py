"""What holds for all tests."""

import os

# Torch's threads spin while they wait for each other. Where two files run side by side, and each
# has as many threads as there are cores, most of them would spin for one that has no core: a
# forward pass of the starter model took minutes, and takes a second. To be set before torch is
# imported; servers that tests start have it from here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
