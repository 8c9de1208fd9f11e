/* Holds a pod's namespaces open until it is told to end. */
#include <signal.h>
#include <unistd.h>

static void end(int number)
{
    (void)number;
    _exit(0);
}

int main(void)
{
    signal(SIGINT, end);
    signal(SIGTERM, end);
    /* As PID 1 of a pod with one process namespace it reaps by ignoring. */
    signal(SIGCHLD, SIG_IGN);
    for (;;)
        pause();
}
