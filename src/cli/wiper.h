/* Deleted volumes of a volume group are wiped in the background: see pool_wipe.c. */
#ifndef VARVE_CLI_WIPER_H
#define VARVE_CLI_WIPER_H

#include "vol/vol.h"

/* From here on operations of this process start `varve pool wipe` at their end when there is
 * something to wipe. Keeps cfg. */
void wiper_allow(const struct config *cfg);

#endif
