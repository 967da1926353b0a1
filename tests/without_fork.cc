// SPDX-License-Identifier: Apache-2.0
//
// Runs a program in which no thread may make a process: who tries is killed, with the whole program, by SIGSYS.
//
//   without_fork COMMAND...
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

sock_filter Load(size_t offset) { return BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset)); }
sock_filter Answer(uint32_t action) { return BPF_STMT(BPF_RET | BPF_K, action); }
// Goes on with the next instruction where the loaded word is `value`, else skips `otherwise` of them.
sock_filter Equals(uint32_t value, uint8_t otherwise) {
  return BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, otherwise);
}
sock_filter HasBits(uint32_t bits, uint8_t otherwise) {
  return BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, otherwise);
}

bool ForbidProcesses() {
  std::vector<sock_filter> filter = {Load(offsetof(seccomp_data, nr))};
#ifdef __NR_fork
  filter.insert(filter.end(), {Equals(__NR_fork, 1), Answer(SECCOMP_RET_KILL_PROCESS)});
  filter.insert(filter.end(), {Equals(__NR_vfork, 1), Answer(SECCOMP_RET_KILL_PROCESS)});
#endif
  // Its flags lie in memory, where no filter looks. The C library falls back to clone.
  filter.insert(filter.end(), {Equals(__NR_clone3, 1), Answer(SECCOMP_RET_ERRNO | ENOSYS)});
  filter.insert(filter.end(), {Equals(__NR_clone, 4), Load(offsetof(seccomp_data, args[0])), HasBits(CLONE_THREAD, 1),
                               Answer(SECCOMP_RET_ALLOW), Answer(SECCOMP_RET_KILL_PROCESS)});
  // Every other call lands past the last answer above.
  filter.push_back(Answer(SECCOMP_RET_ALLOW));
  const sock_fprog program = {static_cast<unsigned short>(filter.size()), filter.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || !ForbidProcesses()) {
    std::perror("without_fork: no filter");
    return 2;
  }
  execv(argv[1], argv + 1);
  std::perror(argv[1]);
  return 2;
}
