/*
 * Switch of stacks, AAPCS64. Saves x19-x30 and d8-d15; the floating-point control register is
 * the thread's and is never changed here.
 */
        .text

/* void co_switch(void **save_sp, void *load_sp) */
        .globl  co_switch
        .hidden co_switch
        .type   co_switch, %function
        .p2align 4
co_switch:
        .cfi_startproc
        sub     sp, sp, #160
        .cfi_adjust_cfa_offset 160
        stp     x19, x20, [sp, #0]
        stp     x21, x22, [sp, #16]
        stp     x23, x24, [sp, #32]
        stp     x25, x26, [sp, #48]
        stp     x27, x28, [sp, #64]
        stp     x29, x30, [sp, #80]
        .cfi_rel_offset x29, 80
        .cfi_rel_offset x30, 88
        stp     d8, d9, [sp, #96]
        stp     d10, d11, [sp, #112]
        stp     d12, d13, [sp, #128]
        stp     d14, d15, [sp, #144]
        mov     x9, sp
        str     x9, [x0]
        mov     sp, x1
        ldp     x19, x20, [sp, #0]
        ldp     x21, x22, [sp, #16]
        ldp     x23, x24, [sp, #32]
        ldp     x25, x26, [sp, #48]
        ldp     x27, x28, [sp, #64]
        ldp     x29, x30, [sp, #80]
        ldp     d8, d9, [sp, #96]
        ldp     d10, d11, [sp, #112]
        ldp     d12, d13, [sp, #128]
        ldp     d14, d15, [sp, #144]
        add     sp, sp, #160
        .cfi_adjust_cfa_offset -160
        .cfi_restore x29
        .cfi_restore x30
        ret
        .cfi_endproc
        .size   co_switch, . - co_switch

/* First frame of every coroutine: x19 holds the struct co. Unwinders stop here. */
        .globl  co_boot
        .hidden co_boot
        .type   co_boot, %function
        .p2align 4
co_boot:
        .cfi_startproc
        .cfi_undefined x30
        mov     x0, x19
        bl      co_main
        brk     #1
        .cfi_endproc
        .size   co_boot, . - co_boot

        .section .note.GNU-stack, "", %progbits
