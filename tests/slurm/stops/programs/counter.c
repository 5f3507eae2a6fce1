/* counts: a program of a user's that knows its rank, saves its count, and heeds SIGTERM.
 *
 *     counter FOLDER      goes on from FOLDER/count-RANK, until there is FOLDER/finish
 *     counter             a daemon in a session of its own that heeds nothing
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { STOPPED = 75 };

static volatile sig_atomic_t asked;

static void ask(int number) { asked = number; }

static void be_stray(void) {
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    setsid();
    prctl(PR_SET_NAME, "stray");
    for (;;) pause();
}

static void tell(const char *path, const char *mode, const char *word, long count) {
    FILE *file = fopen(path, mode);
    if (file == NULL) exit(99);
    fprintf(file, "%s %ld\n", word, count);
    if (fclose(file) != 0) exit(99);
}

int main(int argc, char **argv) {
    char saved[4000], written[4096], told[4096], finish[4096];
    long count = 0;
    const char *rank = getenv("RANK");
    if (argc < 2) be_stray();
    if (rank == NULL) return 98;
    signal(SIGTERM, ask);
    if (fork() == 0) be_stray();
    snprintf(saved, sizeof saved, "%s/count-%s", argv[1], rank);
    snprintf(written, sizeof written, "%s.new", saved);
    snprintf(told, sizeof told, "%s/told-%s", argv[1], rank);
    snprintf(finish, sizeof finish, "%s/finish", argv[1]);
    FILE *file = fopen(saved, "r");
    if (file != NULL && (fscanf(file, "count %ld", &count) != 1 || fclose(file) != 0)) return 97;
    tell(told, "a", "from", count);
    while (!asked && access(finish, F_OK) != 0) {
        usleep(20000);
        tell(written, "w", "count", ++count);
        if (rename(written, saved) != 0) return 96;
    }
    tell(told, "a", asked ? "stopped" : "done", count);
    return asked ? STOPPED : 0;
}
