import Foundation
import MLXInferClient

let client = Client()
for try await event in client.chat([.system("Be brief."), .user("What is the capital of France?")]) {
    if case .text(let piece) = event { print(piece, terminator: "") }
    fflush(nil)  // a terminal waits for the end of the line otherwise
}
