/*
 * Letters between reactors: how one thread gives work to another without a lock.
 *
 * A letter is embedded in what it is about; nothing is allocated. Its function runs in plain code
 * on the thread of the reactor it was sent to, and may pass the letter on: whoever sends it gives
 * away the struct around it until a letter comes back. Letters of one sender to one receiver arrive
 * in the order they were sent, those of mail_send() and those of mail_post() each among themselves.
 */
#ifndef VARVE_RT_MAIL_H
#define VARVE_RT_MAIL_H

struct reactor;

struct mail {
    struct mail *next;
    void (*fn)(struct mail *m);
};

/* Any thread; r must be alive. At once. */
void mail_post(struct reactor *r, struct mail *m);
/* From a reactor's thread, to any reactor, its own too. Leaves at the end of the turn together with
 * all others to the same reactor: one exchange of the mailbox's head, and one wake, for all. */
void mail_send(struct reactor *r, struct mail *m);

#endif
