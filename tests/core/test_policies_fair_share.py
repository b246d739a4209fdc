"""Fair share: tenants get the same service, whatever they ask for and how often."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_core.policies import FairSharePolicy, FCFSPolicy, SchedulingPolicy
from octavo_core.request import Request
from support.policy_driver import PolicyDriver, make_waiting


def arrive(
    driver: PolicyDriver, tenant: str | None, prompt: int = 4, max_tokens: int = 1000
) -> Request:
    name = f"{tenant}{len(driver.arrivals)}"
    return driver.arrive(make_waiting(name, prompt, tenant=tenant, max_tokens=max_tokens))


def test_tenants_take_turns_whoever_came_first() -> None:
    driver = PolicyDriver(FairSharePolicy())
    for _ in range(5):
        arrive(driver, "flood")
    for _ in range(2):
        arrive(driver, "light")
    order = [driver.admit().tenant for _ in range(7)]
    assert order == ["flood", "light", "flood", "light", "flood", "flood", "flood"]


def test_short_requests_get_more_turns_than_long_ones() -> None:
    driver = PolicyDriver(FairSharePolicy())
    for _ in range(20):
        arrive(driver, "long", prompt=100)
        arrive(driver, "short", prompt=10)
    first = [driver.admit().tenant for _ in range(11)]
    assert first.count("long") == 1
    assert first.count("short") == 10


def test_output_tokens_count_twice_and_prompt_tokens_once() -> None:
    policy = FairSharePolicy()
    driver = PolicyDriver(policy)
    arrive(driver, "a", prompt=10)
    driver.admit()
    assert policy.service_of("a") == 10
    for _ in range(3):
        driver.step()
    assert policy.service_of("a") == 10 + 3 * 2


def test_weights_are_the_operators() -> None:
    policy = FairSharePolicy(input_weight=0.5, output_weight=3)
    driver = PolicyDriver(policy)
    arrive(driver, "a", prompt=10, max_tokens=2)
    driver.admit()
    driver.step()
    driver.step()  # it ends, and what it was given stays counted
    assert not driver.running
    assert policy.service_of("a") == 5 + 6


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_weights_are_positive_numbers(weight: float) -> None:
    with pytest.raises(ConfigError, match=f"output_weight is {weight}"):
        FairSharePolicy(output_weight=weight)


def test_what_runs_counts_before_the_next_one_is_chosen() -> None:
    driver = PolicyDriver(FairSharePolicy())
    arrive(driver, "talker", prompt=1)
    driver.admit()
    arrive(driver, "talker", prompt=1)
    driver.admit()
    for tenant in ("talker", "reader"):
        arrive(driver, tenant, prompt=1)
    arrive(driver, "reader", prompt=30)
    driver.step()
    assert driver.admit().tenant == "reader"
    driver.step()
    driver.step()
    assert driver.admit().tenant == "reader"  # 1 + 2 × 2 against 2 + 2 × 6
    for _ in range(9):
        driver.step()
    assert driver.admit().tenant == "talker"


def test_a_request_that_is_computed_again_is_not_charged_again() -> None:
    policy = FairSharePolicy()
    driver = PolicyDriver(policy)
    arrive(driver, "a", prompt=10)
    driver.admit()
    driver.step()
    driver.preempt()
    assert policy.service_of("a") == 12
    driver.admit()
    driver.step()
    assert policy.service_of("a") == 14


def test_tokens_that_a_resumed_request_brings_along_are_not_charged() -> None:
    policy = FairSharePolicy()
    driver = PolicyDriver(policy)
    request = make_waiting("a", 10, tenant="a")
    for token_id in range(5):
        request.token_ids.append(token_id)
    driver.arrive(request)
    driver.admit()
    assert policy.service_of("a") == 10


def test_who_was_idle_has_saved_nothing_up() -> None:
    driver = PolicyDriver(FairSharePolicy())
    arrive(driver, "idle", prompt=1)
    driver.finish(driver.admit())
    for _ in range(50):
        arrive(driver, "busy", prompt=10)
    for _ in range(20):
        driver.finish(driver.admit())
    for _ in range(20):
        arrive(driver, "idle", prompt=10)
    order = [driver.admit().tenant for _ in range(10)]
    assert order.count("idle") == order.count("busy") == 5


def test_who_leaves_for_a_moment_keeps_its_debt() -> None:
    driver = PolicyDriver(FairSharePolicy())
    arrive(driver, "huge", prompt=1000)
    driver.finish(driver.admit())
    for _ in range(30):
        arrive(driver, "small", prompt=10)
    driver.admit()
    arrive(driver, "huge", prompt=1000)
    assert {driver.admit().tenant for _ in range(25)} == {"small"}


def test_the_victim_is_the_newest_of_the_most_served() -> None:
    driver = PolicyDriver(FairSharePolicy())
    small, big, big_too = (
        arrive(driver, *who) for who in [("small", 1), ("big", 100), ("big", 100)]
    )
    for _ in range(3):
        driver.admit()
    last = arrive(driver, "small", 1)
    driver.admit()
    assert [driver.preempt() for _ in range(4)] == [big_too, big, last, small]


def test_a_preempted_request_is_the_first_of_its_tenant_again() -> None:
    driver = PolicyDriver(FairSharePolicy())
    first = arrive(driver, "a", 3)
    driver.admit()
    arrive(driver, "a", 3)
    driver.preempt()
    assert driver.admit() is first


def test_requests_without_a_tenant_share_one() -> None:
    driver = PolicyDriver(FairSharePolicy())
    for _ in range(4):
        arrive(driver, None, 5)
    for _ in range(4):
        arrive(driver, "named", 5)
    order = [driver.admit().tenant for _ in range(4)]
    assert order.count(None) == 2


def test_a_light_tenant_is_not_delayed_by_a_flood() -> None:
    """It is admitted after at most one new request of each other tenant."""
    driver = PolicyDriver(FairSharePolicy())
    for number in range(3000):
        arrive(driver, f"flood{number % 3}", prompt=1 + number % 50)
    for turn in range(60):
        light = arrive(driver, "light", prompt=1)
        for _ in range(4):
            admitted = driver.admit()
            driver.step()
            driver.finish(admitted)
            if admitted is light:
                break
        assert admitted is light, f"turn {turn}: not among the first four"


class Server:
    """Slots, and tenants that always have another request in line.

    Attributes:
        given: Service of each tenant since the start, counted token by token.
        longest: The longest prompt and the most output tokens that were asked for.
    """

    def __init__(
        self, policy: SchedulingPolicy, num_slots: int, weights: tuple[float, float]
    ) -> None:
        self.num_slots = num_slots
        self.weights = weights
        self.driver = PolicyDriver(policy)
        self.given = {"a": 0.0, "b": 0.0}
        self.longest = [0, 0]

    def arrive(self, tenant: str, prompt: int, max_tokens: int) -> None:
        self.longest = [max(self.longest[0], prompt), max(self.longest[1], max_tokens)]
        arrive(self.driver, tenant, prompt, max_tokens)

    def step(self, rng: random.Random) -> None:
        driver = self.driver
        while driver.waiting and len(driver.running) < self.num_slots:
            request = driver.admit()
            if request.num_preemptions == 0 and request.tenant in self.given:
                self.given[request.tenant] += self.weights[0] * request.num_prompt_tokens
        if rng.random() < 0.1 and len(driver.running) > 1:
            driver.preempt()
        for request in driver.running:
            if request.tenant in self.given:
                self.given[request.tenant] += self.weights[1]
        driver.step()

    @property
    def bound(self) -> float:
        """2 U, as the policy promises it."""
        prompt, outputs = self.longest
        return 2 * (self.weights[0] * prompt + self.weights[1] * self.num_slots * outputs)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_slots=st.integers(1, 6),
    sizes=st.tuples(*[st.tuples(st.integers(1, 60), st.integers(1, 30)) for _ in range(2)]),
    weights=st.tuples(st.sampled_from([0.5, 1, 2]), st.sampled_from([0.5, 1, 2, 4])),
)
def test_two_backlogged_tenants_get_the_same_within_the_bound(
    seed: int,
    num_slots: int,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    weights: tuple[float, float],
) -> None:
    """Over any time, with other tenants coming and going, and preemptions."""
    rng = random.Random(seed)
    server = Server(FairSharePolicy(*weights), num_slots, weights)
    per_tenant = dict(zip("ab", sizes, strict=True))
    differences = [0.0]
    for _ in range(150):
        for tenant, (prompt, outputs) in per_tenant.items():
            in_line = sum(request.tenant == tenant for request in server.driver.waiting)
            for _ in range(num_slots + 1 - in_line):
                server.arrive(tenant, rng.randint(1, prompt), rng.randint(1, outputs))
        if rng.random() < 0.2:
            server.arrive(f"other{rng.randint(0, 3)}", rng.randint(1, 60), rng.randint(1, 30))
        server.step(rng)
        differences.append(server.given["a"] - server.given["b"])
    # Over the time from step i to step j the two were given differences[j] - differences[i] apart.
    assert max(differences) - min(differences) <= server.bound


def test_that_test_can_fail() -> None:
    """First come, first served gives more to who asks for more."""
    rng = random.Random(1)
    server = Server(FCFSPolicy(), 2, (1, 2))
    for _ in range(300):
        for tenant in "aaaab":
            server.arrive(tenant, 9, 9)
        server.step(rng)
    assert server.given["a"] - server.given["b"] > server.bound


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "admit", "admit", "preempt", "step", "abort"]),
            st.integers(0, 40),
        ),
        max_size=150,
    )
)
def test_the_head_is_always_the_oldest_of_the_least_served(events: list[tuple[str, int]]) -> None:
    """Against a count that is not lazy."""
    policy = FairSharePolicy()
    driver = PolicyDriver(policy)
    for event, number in events:
        if event == "arrive":
            arrive(driver, f"t{number % 4}", 1 + number, max_tokens=1 + number // 4)
        elif event == "admit" and driver.waiting:
            head = policy.peek()
            services = {
                request.tenant: policy.service_of(request.tenant) for request in driver.waiting
            }
            assert services[head.tenant] == min(services.values())
            line = [request for request in driver.waiting if request.tenant == head.tenant]
            assert head is min(
                line, key=lambda request: (request.num_preemptions == 0, driver.arrivals[request])
            )
            driver.admit()
        elif event == "preempt" and driver.running:
            services = {
                request.tenant: policy.service_of(request.tenant) for request in driver.running
            }
            victim = driver.preempt()
            assert services[victim.tenant] == max(services.values())
        elif event == "step":
            driver.step()
        elif event == "abort" and driver.arrivals:
            request = list(driver.arrivals)[number % len(driver.arrivals)]
            if not request.is_finished:
                driver.abort(request)


def test_few_idle_tenants_are_remembered() -> None:
    policy = FairSharePolicy(max_idle_tenants=10)
    driver = PolicyDriver(policy)
    for number in range(100):
        arrive(driver, f"t{number}", prompt=1 + number)
        driver.finish(driver.admit())
    assert len(policy._tenants) <= 10
    assert policy.service_of("t99") > policy.service_of("t0")
