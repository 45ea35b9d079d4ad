/* Makes one system call for each argument and prints, one line each, 0 or the errno; "signal N" if it ended
 * the process. An argument is NUMBER,A0,A1,…: numbers, or
 *   path   a path that does not exist        buf   4096 zero bytes
 *   ns:F   struct clone_args with flags F
 * Each call has a child of its own, so that what it changes, or starts, is gone afterwards. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t zeroes[512];
static uint64_t clone_args[8];

static long word(const char *text)
{
    if (strcmp(text, "path") == 0)
        return (long)"/nonexistent";
    if (strcmp(text, "buf") == 0)
        return (long)zeroes;
    if (strncmp(text, "ns:", 3) == 0) {
        clone_args[0] = strtoull(text + 3, NULL, 0);
        clone_args[4] = SIGCHLD;
        return (long)clone_args;
    }
    return (long)strtoull(text, NULL, 0);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        long call[7] = {0};
        int n = 0;
        for (char *part = strtok(argv[i], ","); part && n < 7; part = strtok(NULL, ","))
            call[n++] = word(part);
        int result[2];
        if (pipe(result) != 0)
            return 2;
        pid_t child = fork();
        if (child < 0)
            return 2;
        if (child == 0) {
            pid_t self = getpid();
            errno = 0;
            long value = syscall(call[0], call[1], call[2], call[3], call[4], call[5], call[6]);
            int code = value == -1 ? errno : 0;
            if (getpid() != self) /* clone returns twice: this is the copy */
                _exit(0);
            if (write(result[1], &code, sizeof code) != sizeof code)
                _exit(3);
            _exit(0);
        }
        close(result[1]);
        int code = -1, status = 0;
        ssize_t got = read(result[0], &code, sizeof code);
        close(result[0]);
        waitpid(child, &status, 0);
        if (got == sizeof code)
            printf("%d\n", code);
        else
            printf("signal %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        fflush(stdout);
    }
    return 0;
}
