import Dispatch
import Foundation

/// Turns Ctrl-C into the cancellation of the answer that is being written; between answers it ends the program. `@unchecked`,
/// because `lock` guards `cancel`.
final class Interrupts: @unchecked Sendable {
    private let lock = NSLock()
    private var cancel: (@Sendable () -> Void)?
    private let source: any DispatchSourceSignal

    init() {
        signal(SIGINT, SIG_IGN)
        source = DispatchSource.makeSignalSource(signal: SIGINT, queue: DispatchQueue(label: "interrupts"))
        source.setEventHandler { [weak self] in self?.interrupt() }
        source.activate()
    }

    /// The result of work that Ctrl-C cancels.
    func cancelling<Output: Sendable>(_ work: @escaping @Sendable () async -> Output) async -> Output {
        let task = Task { await work() }
        set { task.cancel() }
        defer { set(nil) }
        return await task.value
    }

    private func set(_ cancel: (@Sendable () -> Void)?) { lock.withLock { self.cancel = cancel } }

    private func interrupt() {
        guard let cancel = lock.withLock({ cancel }) else { exit(130) }
        cancel()
    }
}
