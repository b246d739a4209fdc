"""Which request or expert a program works for, found on the device.

A grid of ``num_items // size + num_lists`` blocks covers lists that lie one after the other,
whatever their lengths: the blocks of list ``i`` start at ``starts[i] // size + i``. So a grid
needs no list of blocks, and no length has to be known on the host.
"""

import triton
import triton.language as tl


@triton.jit
def block_owner(starts, block, num_lists, SIZE: tl.constexpr):
    """Return the last list whose first block is not after `block`.

    The caller still has to check that the block lies within that list.
    """
    low = 0
    high = num_lists
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // SIZE + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def item_owner(starts, item, num_lists):
    """Return the list that an item is in: the last that starts at or before it."""
    low = 0
    high = num_lists
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1
