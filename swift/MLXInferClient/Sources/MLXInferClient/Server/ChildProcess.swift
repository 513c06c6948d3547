import Foundation

/// A program that runs as a child, and ends with this process, however that ends.
final class ChildProcess: Sendable {
    /// Runs the program until it ends by itself, or until its own standard input ends, because it is to stop or this process is gone;
    /// then it has so many seconds to finish.
    private static let guardian = #"""
        grace=$1; shift; exec 3<&0 4>&2 2>/dev/null
        "$@" 2>&4 3<&- 4>&- </dev/null & child=$!
        exec 4>&-
        { read -r line; kill "$child"; sleep "$grace"; kill -9 "$child"; } <&3 >/dev/null & guard=$!
        exec 3<&-; wait "$child"; status=$?
        kill -9 "$guard" 2>/dev/null; exit "$status"
        """#

    /// Its status, once it has ended.
    let end: Task<Int32, Never>
    /// The last lines of what it wrote.
    private let tail: Locked<[String]>
    private let leash: FileHandle

    /// - Parameters:
    ///   - grace: Seconds between being told to end and being ended.
    ///   - output: Is given every line that the program writes to standard output or standard error.
    /// - Throws: ``MLXInferError/serverEnded(reason:lastWords:)`` where it cannot be started.
    init(_ words: [String], grace: Int, output: @escaping @Sendable (String) -> Void) throws(MLXInferError) {
        let (process, input, lines, tail) = (Process(), Pipe(), Pipe(), Locked([String]()))
        process.executableURL = URL(fileURLWithPath: "/bin/sh")
        process.arguments = ["-c", Self.guardian, "mlxinfer", String(grace)] + words
        (process.standardInput, process.standardOutput, process.standardError) = (input, lines, lines)
        do {
            try process.runWithSignals()
        } catch {
            throw .serverEnded(reason: "\(words[0]) cannot be started: \(error.localizedDescription)", lastWords: "")
        }
        let running = Unchecked(process)
        let log = lines.fileHandleForReading
        end = Task {
            await withCheckedContinuation { continuation in
                IOThread.start {
                    var reader = LineReader()
                    while case let bytes = log.availableData, !bytes.isEmpty {
                        for line in reader.lines(bytes) {
                            tail.withLock { $0 = $0.suffix(9) + [line] }
                            output(line)
                        }
                    }
                    running.value.waitUntilExit()
                    continuation.resume(returning: running.value.terminationStatus)
                }
            }
        }
        (leash, self.tail) = (input.fileHandleForWriting, tail)
    }

    /// The last lines that it wrote, as one text.
    var lastWords: String { tail.withLock { $0.joined(separator: "\n") } }

    /// Tells it to end.
    func stop() { try? leash.close() }
}

/// A value that goes to one other thread, and is not used here any more.
private struct Unchecked<Value>: @unchecked Sendable {
    let value: Value

    init(_ value: Value) { self.value = value }
}

/// Splits bytes into lines.
private struct LineReader {
    private var rest: [UInt8] = []

    /// The lines that these bytes complete.
    mutating func lines(_ bytes: Data) -> [String] {
        rest += bytes
        var parts = rest.split(separator: 10, omittingEmptySubsequences: false)
        rest = parts.popLast().map(Array.init) ?? []
        return parts.map { String(decoding: $0, as: UTF8.self) }
    }
}

extension Process {
    /// Starts it so that signals reach it: on Linux it would inherit that the threads of Swift's tasks block them.
    func runWithSignals() throws {
        var (none, before) = (sigset_t(), sigset_t())
        sigemptyset(&none)
        pthread_sigmask(SIG_SETMASK, &none, &before)
        defer { pthread_sigmask(SIG_SETMASK, &before, nil) }
        try run()
    }
}
