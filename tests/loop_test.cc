// SPDX-License-Identifier: Apache-2.0
#include "daemon/loop.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <future>
#include <thread>

namespace residency {
namespace {

// Runs `task` on the loop and waits for it.
void RunOn(Loop& loop, std::function<void()> task) {
  std::promise<void> done;
  loop.Post([&] {
    task();
    done.set_value();
  });
  done.get_future().wait();
}

TEST_CASE("What one thread posts runs in its order, whatever other threads post") {
  auto loop = *Loop::Start("test");
  std::vector<std::vector<int>> seen(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) loop->Post([&seen, t, i] { seen[t].push_back(i); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  RunOn(*loop, [] {});
  for (const std::vector<int>& order : seen) {
    REQUIRE(order.size() == 1000);
    CHECK(std::is_sorted(order.begin(), order.end()));
  }
}

TEST_CASE("Timers fire in the order of their times, not before them, and not once cancelled") {
  auto loop = *Loop::Start("test");
  std::promise<void> last;
  std::vector<int> fired;
  const absl::Time began = MonotonicNow();
  absl::Time first_fired;
  loop->Post([&] {
    loop->At(began + absl::Milliseconds(60), [&] { last.set_value(); });
    loop->At(began + absl::Milliseconds(40), [&] { fired.push_back(2); });
    loop->At(began + absl::Milliseconds(20), [&] {
      first_fired = MonotonicNow();
      fired.push_back(1);
    });
    loop->CancelTimer(loop->At(began + absl::Milliseconds(30), [&] { fired.push_back(99); }));
  });
  last.get_future().wait();
  RunOn(*loop, [] {});
  CHECK(fired == std::vector<int>{1, 2});
  CHECK(first_fired - began >= absl::Milliseconds(20));
}

TEST_CASE("A watched descriptor calls its handler until it is unwatched, also by the handler itself") {
  auto loop = *Loop::Start("test");
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  std::promise<void> read_once;
  int calls = 0;
  RunOn(*loop, [&] {
    REQUIRE(loop->Watch(reader.get(), EPOLLIN,
                        [&](uint32_t) {
                          ++calls;
                          loop->Unwatch(reader.get());
                          read_once.set_value();
                        })
                .ok());
  });
  REQUIRE(write(writer.get(), "xy", 2) == 2);
  read_once.get_future().wait();
  RunOn(*loop, [] {});
  RunOn(*loop, [] {});
  CHECK(calls == 1);
}

TEST_CASE("Stop runs what was posted, what that posted too, and nothing that comes later") {
  auto loop = *Loop::Start("test");
  std::atomic<int> ran{0};
  loop->Post([&] {
    ++ran;
    loop->Post([&] { ++ran; });
  });
  loop->Stop();
  CHECK(ran == 2);
  loop->Post([&] { ++ran; });
  loop->Stop();
  CHECK(ran == 2);
}

}  // namespace
}  // namespace residency
