# Runs what the bench asks for, each command in the background: the order is a line on a serial port, the
# command, its input and its output are files in /h. One line back for each end.
shopt -s nullglob
ports=(/dev/vport*p1)
exec 3<>"${ports[0]}"
end_of() { # N STATUS
    echo "end $1 $2" >&3
}
echo "up $BENCH_BOOT" >&3
while read -r verb n limit <&3; do
    case $verb in
    run)
        (
            timeout -k 5 "$limit" bash "/h/$n.cmd" >"/h/$n.out" 2>"/h/$n.err" <"/h/$n.in" 3>&- &
            echo $! >"/h/$n.pid"
            wait $!
            end_of "$n" $?
        ) &
        ;;
    stop) kill -TERM "$(<"/h/$n.pid")" ;;   # timeout passes it on to the command and its children
    off) exit 0 ;;
    esac
done
