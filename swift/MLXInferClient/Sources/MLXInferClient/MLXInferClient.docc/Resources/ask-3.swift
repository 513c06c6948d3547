import Foundation
import MLXInferClient

let client = Client()
do {
    for try await event in client.chat([.system("Be brief."), .user("What is the capital of France?")]) {
        if case .text(let piece) = event { print(piece, terminator: "") }
        fflush(nil)  // a terminal waits for the end of the line otherwise
    }
} catch MLXInferError.serverNotRunning(let place) {
    print("Start a server: nothing listens at \(place).")
} catch MLXInferError.streamInterrupted(_, let reason) {
    print("\nThe answer broke off: \(reason)")
} catch {
    print(error.localizedDescription)
}
