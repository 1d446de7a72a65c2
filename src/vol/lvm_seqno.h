/*
 * The number of a VG's metadata, read from its PVs: has anything changed since the last report?
 *
 * A report costs a command, of 50 ms and more; this costs three reads of some KiB. On-disk layout:
 * the label in one of the first four sectors, the PV header behind it with the place of the
 * metadata area, that area's header with the place of the text (lvm2: format_text/layout.h,
 * label/label.h).
 */
#ifndef VARVE_VOL_LVM_SEQNO_H
#define VARVE_VOL_LVM_SEQNO_H

#include "vol/lvm.h"

/*
 * The number as it is on disk now, of the first PV that tells. Waits for reads, no command.
 *
 * Errors   -ENODATA no PV tells (no metadata area, one in use by something else, a text that is not
 * found): read a report.
 */
SUSPENDS int lvm_seqno_read(const struct lvm_vg *vg, uint64_t *ret);

#endif
