import Foundation

@testable import MLXInferClient

/// What a stream hands out, and the error at its end.
func gather(_ events: AnswerEvents<ChatEvent>) async -> (events: [ChatEvent], error: MLXInferError?) {
    var gathered: [ChatEvent] = []
    do {
        for try await event in events { gathered.append(event) }
        return (gathered, nil)
    } catch {
        return (gathered, MLXInferError(error))
    }
}

/// Waits for something that is about to become true; false where it does not within ten seconds.
func eventually(isolation: isolated (any Actor)? = #isolation, _ isTrue: () async throws -> Bool) async rethrows -> Bool {
    for _ in 0..<2000 {
        if try await isTrue() { return true }
        try? await Task.sleep(for: .milliseconds(5))
    }
    return false
}

/// How many files and sockets this process has open.
func openDescriptors() throws -> Int {
    try FileManager.default.contentsOfDirectory(atPath: "/dev/fd").count
}
