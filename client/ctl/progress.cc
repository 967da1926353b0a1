// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

constexpr absl::Duration kRedraw = absl::Milliseconds(100);
constexpr uint64_t kWidestBar = 30;
constexpr char kWipeLine[] = "\r\x1b[K";

uint64_t TerminalColumns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

void Draw(const std::string& line) {
  std::fputs(absl::StrCat(kWipeLine, line).c_str(), stderr);
  std::fflush(stderr);
}

}  // namespace

std::string ProgressLine(uint64_t bytes_done, uint64_t bytes_total, uint64_t pinned_bytes, absl::Duration elapsed,
                         uint64_t columns) {
  if (bytes_total == 0) return "reading headers";
  const double part = std::min(1.0, static_cast<double>(bytes_done) / static_cast<double>(bytes_total));
  const double seconds = absl::ToDoubleSeconds(elapsed);
  std::string figures = absl::StrFormat("%3d %%  %s of %s", static_cast<int>(part * 100), FormatBytes(bytes_done),
                                        FormatBytes(bytes_total));
  if (seconds > 0) {
    const auto per_second = static_cast<uint64_t>(static_cast<double>(bytes_done) / seconds);
    absl::StrAppend(&figures, "  ", FormatBytes(per_second), "/s");
  }
  if (pinned_bytes > 0) absl::StrAppend(&figures, "  ", FormatBytes(pinned_bytes), " pinned");
  // Two brackets and the space behind them. Where there is no room for a bar the figures matter more.
  if (figures.size() + 3 + 5 > columns) return figures.substr(0, columns);
  const uint64_t width = std::min<uint64_t>(kWidestBar, columns - figures.size() - 3);
  const auto filled = static_cast<uint64_t>(part * static_cast<double>(width));
  return absl::StrCat("[", std::string(filled, '#'), std::string(width - filled, '.'), "] ", figures);
}

ProgressBar::ProgressBar() : visible_(isatty(STDERR_FILENO) == 1), start_(absl::Now()) {}

ProgressBar::~ProgressBar() {
  if (visible_) Draw("");
}

void ProgressBar::Update(uint64_t bytes_done, uint64_t bytes_total, uint64_t pinned_bytes) {
  const absl::Time now = absl::Now();
  if (!visible_ || now - drawn_ < kRedraw) return;
  drawn_ = now;
  Draw(ProgressLine(bytes_done, bytes_total, pinned_bytes, now - start_, TerminalColumns() - 1));
}

Spinner::Spinner(std::string what) : what_(std::move(what)) {
  if (isatty(STDERR_FILENO) == 1) thread_ = std::thread([this] { Run(); });
}

Spinner::~Spinner() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  thread_.join();
  Draw("");
}

void Spinner::Run() {
  constexpr char kFrames[] = "|/-\\";
  const absl::Time start = absl::Now();
  std::unique_lock<std::mutex> lock(mutex_);
  for (uint64_t frame = 0; !done_; ++frame) {
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    Draw(absl::StrFormat("%c %s  %.1f s", kFrames[frame % 4], what_, seconds));
    changed_.wait_until(lock, absl::ToChronoTime(absl::Now() + kRedraw));
  }
}

}  // namespace residency
