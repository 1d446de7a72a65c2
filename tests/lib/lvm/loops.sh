# Active LVs without device-mapper, for `lvm` beside: the content of an LV is a file UUID in .lv/VG, what makes it
# active is a loop device on it, linked as VG/NAME. Content goes with the LV when it is renamed, the length follows the metadata,
# a new LV begins with old bytes. What is done twice does no harm: a command that was killed half-way is caught up with
# by the next.
D=$VARVE_TEST_LVM_LOOPS
mkdir -p "$D/.lv"
exec 9>"$D/.lv/lock"
flock 9

lvs_of() { # each LV of a VG as "UUID NAME BYTES"
    lvm lvs --driverloaded n --devices "$VARVE_TEST_LVM_DEVICES" --noheadings --units b --nosuffix -o lv_uuid,lv_name,lv_size "$1" 2>/dev/null 9>&-
}
loop_of() { # the loop device of a file
    losetup -j "$1" -O NAME -n | head -n 1
}
in_use() { # does a process have it open?
    [ -n "$(find /proc/[0-9]*/fd -lname "$1" 2>/dev/null | head -n 1)" ]
}
activate() { # UUID
    loop=$(loop_of "$F/$1")
    [ -n "$loop" ] || losetup -f "$F/$1"
}
deactivate() { # UUID
    loop=$(loop_of "$F/$1")
    [ -z "$loop" ] || losetup -d "$loop"
}
uuid_of() { # NAME
    echo "$list" | while read -r uuid name _; do
        [ "$name" != "$1" ] || echo "$uuid"
    done
}
match() { # the devices become what the metadata says; the named ones are activated, or the other way round
    list=$(lvs_of "$vg") || return 0 # without an answer nothing is thrown away
    mkdir -p "$D/$vg" "$F"
    echo "$list" | while read -r uuid _ bytes; do
        [ -n "$uuid" ] || continue
        file=$F/$uuid
        [ -e "$file" ] || head -c 1048576 /dev/zero | tr '\0' '\245' >"$file"
        [ "$(stat -c %s "$file")" = "$bytes" ] || truncate -s "$bytes" "$file"
    done
    for n in $names; do
        [ -z "$1" ] || $1 "$(uuid_of "$n")"
    done
    for link in "$D/$vg"/* "$D/$vg"/.[!.]*; do
        [ ! -L "$link" ] || rm -f "$link"
    done
    for file in "$F"/*-*-*; do
        [ -e "$file" ] || continue
        case $list in *"${file##*/}"*) continue ;; esac
        deactivate "${file##*/}"
        rm -f "$file"
    done
    # one look at all loop devices: there may be many LVs
    losetup -O NAME,BACK-FILE -n | while read -r loop file _; do
        case $file in "$F"/*) ;; *) continue ;; esac
        losetup -c "$loop"
        name=$(echo "$list" | sed -n "s/^ *${file##*/} \([^ ]*\) .*/\1/p")
        [ -z "$name" ] || ln -sfn "$loop" "$D/$vg/$name"
    done
}

# The VG, the LVs and the wish of this command
vg= names= wish= skip=
for word; do
    if [ -n "$skip" ]; then
        skip=
        continue
    fi
    case $word in
    --config | --devices | --devicesfile | --lockopt | --fs | --driverloaded) skip=1 ;;
    --name=*) names=${word#--name=} ;;
    -a*n) wish=deactivate ;;
    -a*y) wish=activate ;;
    -*) ;;
    */*) vg=${word%%/*} names="$names ${word#*/}" ;;
    *) [ -n "$vg" ] || vg=$word ;;
    esac
done
F=$D/.lv/$vg
case $verb:$wish in
lvchange:deactivate | lvremove:*)
    for n in $names; do
        loop=$(readlink "$D/$vg/$n") || continue
        if in_use "$loop"; then
            echo "  Logical volume $vg/$n in use." >&2
            exit 5
        fi
    done
    ;;
esac
case $verb in
fullreport)
    # the kernel's part of the report: "X" is what is not known without it
    lvm "$verb" --devices "$VARVE_TEST_LVM_DEVICES" "$@" 9>&- >"$D/.lv/report"
    rc=$?
    script='s/"lv_attr":"\(....\)XX/"lv_attr":"\1--/'
    for link in "$D/$vg"/*; do
        [ -L "$link" ] || continue
        o=-
        ! in_use "$(readlink "$link")" || o=o
        script="/\"lv_name\":\"${link##*/}\"/s/\"lv_attr\":\"\(....\)XX/\"lv_attr\":\"\1a$o/;$script"
    done
    sed "$script" "$D/.lv/report"
    exit $rc
    ;;
vgmknodes)
    match ""
    exit 0
    ;;
esac
${VARVE_TEST_LVM_UNDER:-} lvm "$verb" --devices "$VARVE_TEST_LVM_DEVICES" "$@" 9>&-
rc=$?
case $verb in
lvcreate | lvremove | lvrename | lvextend | lvreduce | lvchange)
    [ $rc = 0 ] || wish=
    [ -z "$vg" ] || match "$wish"
    ;;
esac
exit $rc
